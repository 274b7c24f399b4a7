"""Judgement of a failed TLS handshake: a hiccup of the connection, or a setting with which no try can work.

OpenSSL names its reasons; the bundle of authorities is read anew for each connection, so that a file which
cannot be read arrives as a failed handshake too. Whatever is not known here counts as a hiccup.
"""

from __future__ import annotations

import os
import ssl

from botocore.exceptions import SSLError

FEW_TRIES = 6  # of a handshake that the server refuses without a reason: 2 s, which a hiccup does not last

_ADVICE = {  # another try ends the same way: what the two sides are, not what a connection suffered
    "CERTIFICATE_VERIFY_FAILED": "set AWS_CA_BUNDLE to the server's authority",
    "WRONG_VERSION_NUMBER": "the server speaks no TLS there: http:// in storage.endpoint_url",
    "UNSUPPORTED_PROTOCOL": "the server's TLS is too old",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the server's TLS is too old",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server wants a client's certificate: there is no key for one",
    "TLSV1_ALERT_UNKNOWN_CA": "the server does not know the authority of the client's certificate",
}
_REFUSED = "SSLV3_ALERT_HANDSHAKE_FAILURE"  # no cipher in common, no certificate, or a server that is going
_FILE_LIBRARIES = {"PEM", "X509"}  # parts of OpenSSL that read files of certificates
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def tls_advice(error: SSLError, tries: int) -> str:
    """Say what to do about a failed handshake that trying again cannot mend; "" where it may.

    Args:
        tries: of this call so far, all of which have failed.
    """
    cause = _cause(error)
    if isinstance(cause, _NO_FILE) or (isinstance(cause, ssl.SSLError) and cause.library in _FILE_LIBRARIES):
        bundle = os.environ.get("AWS_CA_BUNDLE")
        named = f"AWS_CA_BUNDLE={bundle}" if bundle else "the bundle of authorities (AWS_CA_BUNDLE)"
        return f"{named} cannot be read"
    reason = getattr(cause, "reason", None) or ""
    if reason == _REFUSED and tries >= FEW_TRIES:
        return f"the server refused {tries} handshakes: it has no cipher in common, or wants a certificate"
    return _ADVICE.get(reason, "")


def _cause(error: SSLError) -> OSError | None:
    """The first error of the system or of OpenSSL below this one; what a caller handled lies behind it."""
    cause = error.__cause__ or error.__context__  # botocore's own is an OSError as well
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause
