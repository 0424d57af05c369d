"""The embedding parameter server: owns some buckets of every table and answers workers. Needs no torch."""
