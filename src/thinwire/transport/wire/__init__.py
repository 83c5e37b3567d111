"""Transport between sites: ZeroMQ with CURVE keys over TCP."""
