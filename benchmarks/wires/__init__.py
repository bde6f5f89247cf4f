"""What crosses between devices: tokens, weights, and the bytes of compiled programs."""
