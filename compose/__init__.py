"""Images and Compose stacks: the roles in containers, on one of four links."""
