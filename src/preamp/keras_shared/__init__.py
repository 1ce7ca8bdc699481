"""What the adapters of Keras and tf_keras share, without importing either."""
