"""What an adapter is, where it comes from and which name answers with it. No device code here."""
