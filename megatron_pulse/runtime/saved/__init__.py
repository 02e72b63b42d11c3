"""What layers save for their backward: computed again, in part or whole, or on the host."""
