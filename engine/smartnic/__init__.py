"""The SmartNIC's program: OpenAI's HTTP API in front of the ring."""
