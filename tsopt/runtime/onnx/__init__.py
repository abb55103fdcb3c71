"""The ONNX model of a Program, the engines that take it, and what they compute otherwise than torch."""
