-- Every table of the service. Times are Unix seconds unless a name says otherwise; money is USDC base units.

CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Deals ------------------------------------------------------------------------------------------------------

CREATE TABLE deals (
  id                TEXT PRIMARY KEY,
  version           INTEGER NOT NULL DEFAULT 1,   -- grows with every change that a reader can see
  attempt           INTEGER NOT NULL DEFAULT 1,   -- a lapsed deal may be paid again: the next attempt
  state             TEXT NOT NULL CHECK (state IN ('pending', 'funded', 'accepted', 'delivered', 'disputed',
                                                   'released', 'refunded', 'split', 'lapsed')),
  master_key        TEXT NOT NULL,                -- M it was made under, compressed, hex
  terms             TEXT NOT NULL,                -- canonical JSON (RFC 8785); the deposit address commits to it
  deposit_address   TEXT NOT NULL UNIQUE,
  amount_units      INTEGER NOT NULL CHECK (amount_units > 0),
  price_units       INTEGER NOT NULL CHECK (price_units >= amount_units),
  seller_address    TEXT NOT NULL,
  buyer_address     TEXT NOT NULL CHECK (buyer_address <> seller_address),
  secret_hash       TEXT NOT NULL,
  ref               TEXT,
  instant           INTEGER NOT NULL CHECK (instant IN (0, 1)),
  deadline_hours    INTEGER NOT NULL,
  review_hours      INTEGER NOT NULL,
  decide_hours      INTEGER NOT NULL,
  created_at        INTEGER NOT NULL,
  funded_at         INTEGER,
  accepted_at       INTEGER,
  delivered_at      INTEGER,
  disputed_at       INTEGER,
  ended_at          INTEGER,
  deliver_by        INTEGER,
  review_ends_at    INTEGER,
  decide_by         INTEGER,
  due_at            INTEGER,                      -- when the clock moves this deal; null when nothing is running
  look_at           INTEGER,                      -- when to look at the deposit on the chain again; null: never
  delivery_url      TEXT,
  delivery_sha256   TEXT,
  delivery_note     TEXT,
  dispute_reason    TEXT,
  dispute_statement TEXT,
  decision_note     TEXT,
  seller_offer_units INTEGER CHECK (seller_offer_units BETWEEN 0 AND amount_units),
  buyer_offer_units  INTEGER CHECK (buyer_offer_units BETWEEN 0 AND amount_units),
  seller_units      INTEGER CHECK (seller_units BETWEEN 0 AND amount_units),  -- what the end of the deal gives the seller
  CHECK ((state IN ('released', 'refunded', 'split')) = (seller_units IS NOT NULL)),
  CHECK (state <> 'released' OR seller_units = amount_units),
  CHECK (state <> 'refunded' OR seller_units = 0),
  CHECK (state IN ('pending', 'lapsed') OR funded_at IS NOT NULL),
  CHECK ((state IN ('funded', 'accepted', 'delivered', 'disputed')) = (due_at IS NOT NULL))
) STRICT;
CREATE INDEX deals_due ON deals (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX deals_look ON deals (look_at) WHERE look_at IS NOT NULL;

CREATE TABLE deal_events (
  deal_id TEXT NOT NULL REFERENCES deals,
  number  INTEGER NOT NULL,
  at      INTEGER NOT NULL,
  event   TEXT NOT NULL,
  actor   TEXT NOT NULL CHECK (actor IN ('buyer', 'seller', 'clock', 'chain', 'operator')),
  state   TEXT NOT NULL,
  content TEXT,                                   -- what the actor sent, canonical JSON without its proof
  PRIMARY KEY (deal_id, number)
) STRICT, WITHOUT ROWID;

-- Money in ---------------------------------------------------------------------------------------------------

CREATE TABLE payments (
  id               INTEGER PRIMARY KEY,
  deal_id          TEXT NOT NULL REFERENCES deals,
  attempt          INTEGER NOT NULL,
  payer            TEXT NOT NULL,
  nonce            TEXT NOT NULL,
  protocol         TEXT NOT NULL CHECK (protocol IN ('x402', 'mpp')),
  status           TEXT NOT NULL CHECK (status IN ('claimed', 'unknown', 'settled', 'refused')),
  value_units      INTEGER NOT NULL,
  valid_after      INTEGER NOT NULL,
  valid_before     INTEGER NOT NULL,
  signature        TEXT NOT NULL,
  resource_url     TEXT NOT NULL,
  challenge_id     TEXT,                          -- MPP: the challenge this payment answered
  claimed_at       INTEGER NOT NULL,
  lease_until      INTEGER NOT NULL,              -- one worker at a time: who holds the lease may settle
  settled_at       INTEGER,
  transaction_hash TEXT,                          -- the transaction the chain shows, never what a facilitator says
  claimed_hash     TEXT,                          -- what a facilitator said: a place to look first
  reason           TEXT,                          -- what the last settle or look-up said
  UNIQUE (payer, nonce),
  UNIQUE (deal_id, attempt)
) STRICT;
CREATE INDEX payments_lost ON payments (id) WHERE status = 'settled' AND reason IS NOT NULL;

CREATE TABLE idempotency_keys (
  payer     TEXT NOT NULL,
  key       TEXT NOT NULL,
  body_hash TEXT NOT NULL,
  deal_id   TEXT NOT NULL,
  PRIMARY KEY (payer, key)
) STRICT, WITHOUT ROWID;

-- Money out --------------------------------------------------------------------------------------------------

CREATE TABLE transfers (
  deal_id          TEXT NOT NULL REFERENCES deals,
  leg              TEXT NOT NULL CHECK (leg IN ('seller', 'buyer', 'fee', 'guarantee') OR leg GLOB 'surplus-[1-9]*'),
  payee            TEXT NOT NULL,
  value_units      INTEGER NOT NULL CHECK (value_units > 0),
  valid_after      INTEGER NOT NULL DEFAULT 0,
  valid_before     INTEGER NOT NULL,
  nonce            TEXT NOT NULL,                 -- keccak256(deal id | leg), as unique as they: the token takes it once
  signature        TEXT,                          -- null until the sweep, which alone has the key, has signed
  status           TEXT NOT NULL CHECK (status IN ('due', 'signed', 'sent', 'blocked', 'confirmed', 'offered')),
  transaction_hash TEXT,
  created_at       INTEGER NOT NULL,
  confirmed_at     INTEGER,
  attempts         INTEGER NOT NULL DEFAULT 0,
  next_at          INTEGER,                       -- when the sweep works on it next; null when it is finished
  reason           TEXT,                          -- why the last attempt did not go through
  PRIMARY KEY (deal_id, leg),
  CHECK ((status = 'due') = (signature IS NULL)),
  CHECK ((status IN ('confirmed', 'offered')) = (next_at IS NULL))
) STRICT, WITHOUT ROWID;
CREATE INDEX transfers_open ON transfers (next_at) WHERE next_at IS NOT NULL;

-- A reader's cached record is valid for one version, so every change to what a record shows raises it. Funding does so
-- once, with its event: the guarantee shows when it is signed, the payment when the event is there.
CREATE TRIGGER deal_event_seen AFTER INSERT ON deal_events
  BEGIN UPDATE deals SET version = version + 1 WHERE id = new.deal_id; END;
CREATE TRIGGER transfer_added AFTER INSERT ON transfers WHEN new.leg <> 'guarantee' OR new.signature IS NOT NULL
  BEGIN UPDATE deals SET version = version + 1 WHERE id = new.deal_id; END;
CREATE TRIGGER transfer_changed AFTER UPDATE OF signature, status, transaction_hash ON transfers
  BEGIN UPDATE deals SET version = version + 1 WHERE id = new.deal_id; END;
CREATE TRIGGER payment_changed AFTER UPDATE OF status, transaction_hash ON payments WHEN old.status = 'settled'
  BEGIN UPDATE deals SET version = version + 1 WHERE id = new.deal_id; END;

-- What the database itself forbids, whatever the code does.
CREATE TRIGGER ended_stays_ended BEFORE UPDATE OF state ON deals
  WHEN old.state IN ('released', 'refunded', 'split') AND new.state <> old.state
  BEGIN SELECT RAISE(ABORT, 'a deal that has ended stays ended'); END;
CREATE TRIGGER signed_stays_signed BEFORE UPDATE OF payee, value_units, valid_after, valid_before, nonce, signature ON transfers
  WHEN old.signature IS NOT NULL
  BEGIN SELECT RAISE(ABORT, 'a signed transfer never changes'); END;

-- What agents and people tell the operators ------------------------------------------------------------------

CREATE TABLE feedback (
  id       TEXT PRIMARY KEY,
  at       INTEGER NOT NULL,
  message  TEXT NOT NULL,
  contact  TEXT,
  deal_id  TEXT,                                  -- as the sender wrote it; no such deal need exist
  done_at  INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX feedback_open ON feedback (at) WHERE done_at IS NULL;

-- The sandbox's own world: a dollar that exists only here (empty in live mode) -----------------------------------

CREATE TABLE sandbox_balances (
  address TEXT PRIMARY KEY,
  units   INTEGER NOT NULL CHECK (units >= 0)
) STRICT, WITHOUT ROWID;

CREATE TABLE sandbox_authorizations (
  authorizer       TEXT NOT NULL,
  nonce            TEXT NOT NULL,
  payee            TEXT,                          -- null: cancelled
  units            INTEGER,
  transaction_hash TEXT NOT NULL,
  block            INTEGER NOT NULL,
  PRIMARY KEY (authorizer, nonce)
) STRICT, WITHOUT ROWID;

-- The feed
--
-- Times here are nanoseconds since the Unix epoch, and one counter of them serves all: a check is numbered by its
-- time `at`, its snapshot event has that same number, its facets the numbers after it in the order of their set,
-- its removals the numbers after those. So an event's id is its time, ids and times sort alike, a window of time is a
-- range of ids, and an event that confirms something needs no row at all: a poll that changes nothing writes one
-- feed_checks row (about 30 bytes) and updates its target, its body and its day.

CREATE TABLE feed_targets (
  target        INTEGER PRIMARY KEY,
  id            TEXT NOT NULL UNIQUE,
  name          TEXT NOT NULL,
  base_url      TEXT,                                          -- null: known by name only, pending
  host          TEXT,                                          -- of base_url: one request a host at a time
  headers       TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(headers)),  -- ${NAME} stands for an environment variable
  loopback      INTEGER NOT NULL DEFAULT 0 CHECK (loopback IN (0, 1)),
  enabled       INTEGER NOT NULL DEFAULT 0 CHECK (enabled IN (0, 1)),
  retired       INTEGER NOT NULL DEFAULT 0 CHECK (retired IN (0, 1)),    -- removed, but its history stays
  interval_s    INTEGER NOT NULL CHECK (interval_s BETWEEN 60 AND 86400),
  due_at        INTEGER NOT NULL DEFAULT 0,
  hold_until    INTEGER NOT NULL DEFAULT 0,                    -- Retry-After
  claimed_until INTEGER NOT NULL DEFAULT 0,                    -- the lease of a poll under way, and its token
  etag          TEXT,                                          -- of the latest valid answer, if it carried one
  last_check    INTEGER,                                       -- at of the latest check of any outcome
  last_valid    INTEGER REFERENCES feed_checks (at),
  last_complete INTEGER REFERENCES feed_checks (at),
  changes       INTEGER NOT NULL DEFAULT 0                     -- change events so far
) STRICT;

CREATE TABLE feed_facets (
  facet    INTEGER PRIMARY KEY,
  id       TEXT NOT NULL UNIQUE,
  category TEXT NOT NULL CHECK (category IN ('kind', 'extension')),
  version  INTEGER,
  scheme   TEXT,
  network  TEXT,
  name     TEXT,
  CHECK (CASE category WHEN 'kind' THEN version + length(scheme) + length(network) IS NOT NULL AND name IS NULL
                       ELSE name IS NOT NULL AND version IS NULL END)
) STRICT;

CREATE TABLE feed_sets (
  facet_set INTEGER PRIMARY KEY,
  sha256    BLOB NOT NULL UNIQUE,                              -- of its facet ids in order
  size      INTEGER NOT NULL,
  facets    TEXT NOT NULL                                      -- JSON array of feed_facets.facet, in order
) STRICT;

CREATE TABLE feed_outcomes (
  outcome     INTEGER PRIMARY KEY,
  reason      TEXT NOT NULL,
  http_status INTEGER,
  facet_set   INTEGER REFERENCES feed_sets (facet_set),        -- null: no valid declaration
  complete    INTEGER NOT NULL CHECK (complete IN (0, 1)),     -- every entry understood
  note        TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX feed_outcomes_once
  ON feed_outcomes (reason, coalesce(http_status, 0), coalesce(facet_set, 0), complete, note);

CREATE TABLE feed_bodies (
  body    INTEGER PRIMARY KEY,
  sha256  BLOB NOT NULL UNIQUE,
  size    INTEGER NOT NULL,
  content BLOB,                                                -- zlib; null once thinned
  kept    INTEGER NOT NULL CHECK (kept IN (0, 1)),             -- it shows a change: never thinned
  last_at INTEGER NOT NULL                                     -- the last check that received it
) STRICT;
CREATE INDEX feed_bodies_to_thin ON feed_bodies (last_at) WHERE kept = 0 AND content IS NOT NULL;

CREATE TABLE feed_checks (                                     -- valid answers: these have events
  at      INTEGER PRIMARY KEY,
  target  INTEGER NOT NULL REFERENCES feed_targets (target),
  ms      INTEGER NOT NULL,
  outcome INTEGER NOT NULL REFERENCES feed_outcomes (outcome),
  body    INTEGER NOT NULL REFERENCES feed_bodies (body),
  changes INTEGER NOT NULL                                     -- rows of feed_changes that belong to it
) STRICT;
CREATE INDEX feed_checks_by_target ON feed_checks (target);            -- and by at, which is the rowid

CREATE TABLE feed_failures (                                   -- everything else: no events, so never in a page's way
  at      INTEGER PRIMARY KEY,
  target  INTEGER NOT NULL REFERENCES feed_targets (target),
  ms      INTEGER,
  outcome INTEGER NOT NULL REFERENCES feed_outcomes (outcome),
  body    INTEGER REFERENCES feed_bodies (body)
) STRICT;

CREATE TABLE feed_changes (
  id     INTEGER PRIMARY KEY,                                  -- of the event
  at     INTEGER NOT NULL REFERENCES feed_checks (at),
  target INTEGER NOT NULL REFERENCES feed_targets (target),
  facet  INTEGER NOT NULL REFERENCES feed_facets (facet),
  change TEXT NOT NULL CHECK (change IN ('first_seen', 'removed', 'returned'))
) STRICT;
CREATE INDEX feed_changes_by_change ON feed_changes (change);
CREATE INDEX feed_changes_by_target ON feed_changes (target);
CREATE INDEX feed_changes_by_both ON feed_changes (target, change);

CREATE TABLE feed_capabilities (
  target         INTEGER NOT NULL REFERENCES feed_targets (target),
  facet          INTEGER NOT NULL REFERENCES feed_facets (facet),
  first_seen     INTEGER NOT NULL,                             -- id of that event
  last_confirmed INTEGER,                                      -- id of that event; null: by the target's last_valid check
  missing_at     INTEGER,                                      -- the latest complete check without it
  removed_at     INTEGER,                                      -- the first of the two complete checks without it
  removed_by     INTEGER,                                      -- the second of them
  PRIMARY KEY (target, facet),
  CHECK ((removed_at IS NULL) = (removed_by IS NULL))
) STRICT, WITHOUT ROWID;
CREATE INDEX feed_capabilities_by_facet ON feed_capabilities (facet);

CREATE TABLE feed_days (
  target    INTEGER NOT NULL REFERENCES feed_targets (target),
  day       INTEGER NOT NULL,                                  -- days since the Unix epoch
  checks    INTEGER NOT NULL,
  valid     INTEGER NOT NULL,
  reachable INTEGER NOT NULL,
  PRIMARY KEY (target, day)
) STRICT, WITHOUT ROWID;
