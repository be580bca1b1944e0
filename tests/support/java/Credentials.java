import java.net.URI;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.s3a.auth.CredentialProviderListFactory;

/** Prints the access key that Hadoop's file system for S3 finds, with the providers of its argument. */
public class Credentials {
    public static void main(String[] arguments) throws Exception {
        Configuration conf = new Configuration();
        conf.set("fs.s3a.aws.credentials.provider", arguments[0]);
        var providers = CredentialProviderListFactory.createAWSCredentialProviderList(URI.create("s3a://lake"), conf);
        System.out.println(providers.resolveCredentials().accessKeyId());
    }
}
