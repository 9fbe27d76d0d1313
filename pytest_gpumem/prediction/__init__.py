"""What a program will need: closed forms, and what follows from running it on simulated GPUs."""
