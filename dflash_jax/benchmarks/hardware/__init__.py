"""What a device does with this package's programs: one report, for whoever holds an accelerator."""
