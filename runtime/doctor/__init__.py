"""What this machine has and lacks."""
