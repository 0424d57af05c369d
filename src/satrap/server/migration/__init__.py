"""Migration of buckets from one server to another while training continues."""
