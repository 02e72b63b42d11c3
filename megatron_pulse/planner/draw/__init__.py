"""Pictures of partitions, schedules and traces (SVG), and events for the Perfetto viewer."""
