"""`--quantization`: weights in int8, made of any checkpoint when it is loaded."""
