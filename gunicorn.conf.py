"""Gunicorn reads this file by itself; command-line options win over it."""

import resource

bind = "127.0.0.1:8402"
workers = 2
threads = 72  # a paid call may wait many seconds for others: more than DEALS_MAX_IN_FLIGHT, so that readers find one
timeout = 90  # settling may take 25 s, looking at the chain some more
limit_request_field_size = 32768  # payment headers may be 16 KiB; the service refuses larger ones kindly
control_socket_disable = True  # it would lie in the home directory, one for all

FILES = 4096  # every thread may keep some twenty open: the database, its counters, connections to facilitators
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if 0 <= _soft < FILES:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES if _hard < 0 else min(FILES, _hard), _hard))
