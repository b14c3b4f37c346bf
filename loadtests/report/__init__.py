"""``blinkbed report``: one page (HTML and Markdown) and a trace of what `compare` measured."""
