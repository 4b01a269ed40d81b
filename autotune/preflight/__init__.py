"""Before every run: does this very configuration fit here, and if not, which one does?"""
