"""What-if: the scheduler's own source in virtual time, over traces of any length."""
