"""Parts that all exports share: values, texts and parts of models as other software writes them."""
