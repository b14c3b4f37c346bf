"""What runs inside a guest: init and the agent; nothing but Python's standard library."""
