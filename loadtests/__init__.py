"""Load tests and benchmarks: Locust users, gates, and the table of figures."""
