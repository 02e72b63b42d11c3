"""What operations give each other: kept on their device, or sent to another by its channel."""
