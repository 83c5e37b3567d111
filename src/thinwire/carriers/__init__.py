"""Carriers: where named blobs, leases and journals lie when no host stays: memory, a folder, a bucket."""
