// Errors as values, as the public headers have them.
#pragma once

#include "tokenweave/status.h"
