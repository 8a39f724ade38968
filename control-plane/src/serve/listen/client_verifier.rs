//! Decides which client certificates a listener accepts: the certificates of its CA, except the
//! listener's own certificate.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    SignatureScheme,
};
use webpki::EndEntityCert;

use crate::error::error_text;

/// Accepts the certificates that [`WebPkiClientVerifier`] accepts, unless the key is the server's
/// own, because a daemon is not a proxy.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    authority: Arc<dyn ClientCertVerifier>,
    own_key: Box<[u8]>,
}

// === impl ClientVerifier ===

impl ClientVerifier {
    /// Accepts clients of `roots` in a listener whose certificate is `own`.
    ///
    /// # Errors
    /// Fails if the CA or the certificate is invalid.
    pub(super) fn try_new(
        roots: RootCertStore,
        own: &CertificateDer<'_>,
    ) -> Result<Arc<Self>, String> {
        let authority = WebPkiClientVerifier::builder(Arc::new(roots))
            .build()
            .map_err(error_text)?;
        let own_key = public_key(own).map_err(error_text)?;
        Ok(Arc::new(Self { authority, own_key }))
    }
}

fn public_key(certificate: &CertificateDer<'_>) -> Result<Box<[u8]>, webpki::Error> {
    let certificate = EndEntityCert::try_from(certificate)?;
    Ok(certificate.subject_public_key_info().as_ref().into())
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.authority.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .authority
            .verify_client_cert(end_entity, intermediates, now)?;
        match public_key(end_entity) {
            Ok(key) if key != self.own_key => Ok(verified),
            _ => Err(Error::InvalidCertificate(
                CertificateError::ApplicationVerificationFailure,
            )),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authority.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authority.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authority.supported_verify_schemes()
    }
}
