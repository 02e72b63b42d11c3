"""The torch modules behind the families, composed from Megatron-Core parts by ``ModuleSpec``."""
