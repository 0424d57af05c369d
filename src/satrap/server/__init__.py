"""The embedding parameter server: owns some buckets of every table and answers workers. Does not need torch."""
