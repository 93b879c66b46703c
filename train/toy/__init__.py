"""The bundled pair, from generated text to target and drafter; not needed to train a drafter for a published target."""
