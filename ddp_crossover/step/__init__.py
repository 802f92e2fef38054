"""An optimizer's ``step()``, put off until each of its parameters is used."""
