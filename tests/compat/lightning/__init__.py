from meshwright.user.torchvision_import import mend_torchvision

mend_torchvision()  # Lightning imports torchvision where it is installed
