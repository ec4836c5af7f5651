"""What a scheduler and a gateway that decides in its own process share."""
