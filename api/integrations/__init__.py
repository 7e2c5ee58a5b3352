"""Other engines on kvpager's tiers. Nothing here is imported by the rest of kvpager."""
