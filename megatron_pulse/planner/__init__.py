"""What runs where and when: placement, partition, schedule, messages. Imports no torch."""
