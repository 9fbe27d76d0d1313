"""The holders of bytes: categories, source lines, differences. Imports neither torch nor NVML."""
