"""What jobs have measured on this user's machines, beside what was predicted of them."""
