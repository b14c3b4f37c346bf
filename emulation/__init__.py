"""What stands in for hardware: the simulated GPU, links and machines."""
