-- Every table of the service. Times are Unix seconds unless a name says otherwise; money is USDC base units.

CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
