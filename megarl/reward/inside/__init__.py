"""What runs inside the sandbox: plain Python without megarl. `megarl.reward.sandbox` copies it there."""
