"""``blinkbed compare``: the control paths over a grid of loads, with and without interference."""
