"""Two small machines with Soft-RoCE, for hosts whose kernel has none."""
