"""Measures a link and a model, and says whether compression pays there: ``python -m edgc_ddp.doctor``.

``facts`` what was measured, ``measure`` the measuring, ``compressor`` averages without a backward,
``subject`` the model, ``advise`` from facts to advice, ``words`` and ``experiment`` what is written.
"""
