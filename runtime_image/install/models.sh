#!/bin/sh
# models.sh: copies models/ of the build context, where there is one, to /opt/omni/models, readable by any user.
set -eu
context=${CONTEXT:-/context}
mkdir -p /opt/omni/models
[ -d "$context/models" ] || exit 0
cp -R --no-preserve=ownership "$context/models/." /opt/omni/models/
chmod -R u=rwX,go=rX /opt/omni/models
