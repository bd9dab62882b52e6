"""What a user says: flags, pins, models, devices and batches, resolved into the vocabulary."""
