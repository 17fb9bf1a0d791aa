def outer():
    try:
        {}["missing"]
    except KeyError as error:
        raise RuntimeError("the cause is above") from error


outer()
