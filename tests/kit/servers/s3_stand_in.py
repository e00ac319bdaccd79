"""moto's S3 server, which answers for an upload that there is not as S3 does; its arguments.

AWS and MinIO say 404 NoSuchUpload, once the right to put an object is seen; moto says 500.
"""

import sys
from functools import wraps

from moto.s3.exceptions import NoSuchUpload
from moto.s3.models import S3Backend
from moto.server import main


def _known_uploads(upload_part):
    @wraps(upload_part)
    def guarded(self, bucket_name, multipart_id, *args, **kwargs):
        if multipart_id not in self.get_bucket(bucket_name).multiparts:
            raise NoSuchUpload(upload_id=multipart_id)
        return upload_part(self, bucket_name, multipart_id, *args, **kwargs)

    return guarded


if __name__ == "__main__":
    S3Backend.upload_part = _known_uploads(S3Backend.upload_part)
    sys.exit(main(sys.argv[1:]))
