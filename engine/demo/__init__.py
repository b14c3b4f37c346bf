"""``blinkbed demo``: answers streamed to the terminal while the host process stands still."""
