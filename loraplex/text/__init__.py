"""Text on either side of the engine: prompts to token ids, chats to prompts, token ids to text. No torch."""
