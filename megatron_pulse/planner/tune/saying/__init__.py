"""What a search found, in words.

============  ===================================================================================
explain       why the others are not the best, and how sure that is
fewer         one device or one node that would train faster than all
nothing_fits  what would have to change where nothing can run
============  ===================================================================================
"""
