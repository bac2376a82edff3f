"""Gunicorn reads this file by itself; command-line options win over it."""

bind = "127.0.0.1:8402"
workers = 2
threads = 4
timeout = 90  # settling may take 25 s, looking at the chain some more
limit_request_field_size = 32768  # payment headers may be 16 KiB; the service refuses larger ones kindly
control_socket_disable = True  # it would lie in the home directory, one for all
