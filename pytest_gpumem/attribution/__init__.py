"""Who holds the bytes: categories, source lines, differences. Imports neither torch nor NVML."""
