"""What one device computes."""
