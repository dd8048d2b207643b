"""What a run needs before any GPU is booked: memory, batches, time, layouts. Arithmetic alone, nothing is built."""
