"""Control paths: who runs the scheduler, and when."""
